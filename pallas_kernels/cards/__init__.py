"""What was measured on each card: one file a card, which ``table`` reads."""
