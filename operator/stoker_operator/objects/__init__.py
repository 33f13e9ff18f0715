"""Facts about the cluster, and names, labels and owner references of an endpoint's objects."""
