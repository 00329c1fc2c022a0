"""Small exact experiments: theorems whose answer is known, which prove the machinery as much as the theorem."""
