"""Transition to linearity: chapter 2 of source 003."""
