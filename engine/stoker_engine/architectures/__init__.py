"""What models are made of, read from their config.json as plain data: torch-free, and the operator imports it, too.

config_fields      a config.json's fields, under any of their names
model_config       the whole model's shape
decoder_config     the parts a decoder is assembled from: cache_spec, mla_config, moe_config, rope_config
families/          config.json → those parts, a file for each group of families
no_decoder         models that no engine of this kind serves, and why
"""
