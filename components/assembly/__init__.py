"""Groups of rollouts -> training batch."""
