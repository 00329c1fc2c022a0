"""Meta-gradients of a training: its steps, their tangents, and three ways through them."""
