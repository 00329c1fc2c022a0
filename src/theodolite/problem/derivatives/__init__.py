"""Derivatives of the user's model: twice, exactly, and through `torch.func` transforms."""
