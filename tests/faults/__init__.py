"""What breaks, on purpose."""
