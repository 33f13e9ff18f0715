"""Model architectures as plain data, without torch, because the operator imports them.

config_fields      fields of a config.json, under any of their names
model_config       shape of the whole model
decoder_config     parts of a decoder: cache_spec, mla_config, moe_config, rope_config
families/          config.json → decoder parts, one file for each group of families
no_decoder         why a model is not an autoregressive decoder
quantization/      quantization of a checkpoint, and stored_formats: formats of quantized matrices
weight_names       names of weights in files, and weight_layout: their conversion to parameters
gguf/              config and weight names of GGUF files
"""
