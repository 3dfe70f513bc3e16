"""Workers compute gradients, servers hold the parameters, and a coordinator directs both."""
