"""What a run tells people: metrics, events, the report."""
