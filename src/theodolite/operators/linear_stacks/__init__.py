"""Plain stacks of linear layers: their Hessians in closed form, without autograd."""
