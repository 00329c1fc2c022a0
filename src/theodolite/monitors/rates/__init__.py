"""Learning rates that follow the critical one (`critical_rate`), or exceed it on purpose (`multi_catapult`)."""
