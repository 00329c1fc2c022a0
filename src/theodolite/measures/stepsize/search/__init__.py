"""The search for the step size of a training: what is tried, on what, and which way wins."""
