"""The validating webhook: reviews, and the certificate that it is served with."""
