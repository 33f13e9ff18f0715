"""Autoscaling in virtual time: Stoker's autoscaler beside models of HPA's and Knative's."""
