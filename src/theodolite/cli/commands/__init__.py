"""One file per command; torch and matplotlib are imported when a command runs."""
