"""Example programs, each about one screen long; see README.md."""
