"""Pictures of attention."""
