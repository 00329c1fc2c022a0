"""What the survey advises, tried before it is given."""
