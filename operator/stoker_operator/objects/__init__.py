"""What was seen of the cluster, as values, and the labels that mark an endpoint's objects."""
