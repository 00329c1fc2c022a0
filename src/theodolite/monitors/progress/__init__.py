"""Is it learning? The loss (`loss_course`) against a guess (`trivial`), the layers (`layers`), and alerts while it runs."""
