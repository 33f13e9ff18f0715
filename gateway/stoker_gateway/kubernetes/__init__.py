"""Who is where, and whose keys are in force, as the API server says."""
