"""Child processes, the causes of their death, and the memory and start time of processes."""
