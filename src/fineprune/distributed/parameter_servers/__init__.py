"""Workers compute gradients and servers hold the parameters: Ray actors that a driver directs."""
