"""KEDA's external push scaler: endpoints without ``spec.scaling`` are scaled by KEDA, by what the gateway knows."""
