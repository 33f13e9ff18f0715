"""KEDA's external push scaler: KEDA scales endpoints without ``spec.scaling`` by the load that the gateway reports."""
