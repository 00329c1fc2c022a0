"""Measurements during training: one of the curvature (`curvature`), and when there is time for one (`scheduler`)."""
