"""Where everything is known: quadratics and random least-squares tasks."""
