"""Who may use which models, and how much."""
