"""Workers compute gradients, servers hold the parameters, and a coordinator drives both."""
