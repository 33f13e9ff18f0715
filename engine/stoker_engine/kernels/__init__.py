"""One operation a file: the plain-torch reference that defines it; faster versions for a device stand beside it."""
