"""Autoscaling in virtual time: Stoker's autoscaler compared with models of HPA and Knative."""
