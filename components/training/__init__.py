"""Training batch -> new policy."""
