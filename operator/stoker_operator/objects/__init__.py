"""Facts about the cluster as values, and the labels and owner references of an endpoint's objects."""
