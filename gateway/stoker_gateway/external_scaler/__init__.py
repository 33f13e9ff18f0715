"""KEDA's external push scaler, by which KEDA scales endpoints without ``spec.scaling``."""
