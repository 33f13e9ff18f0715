"""Memory arithmetic for a model: the operator plans with these sums, and the engine allocates by them.

memory                                              memory use of each device, and number of KV-cache blocks
weight_sizes  quantized_weights  weight_formats  dtype_sizes
                                                    sizes of all tensors, including quantized ones
cache_groups                                        layers of different kinds share one pool of equal blocks
pipeline_stages                                     layers of each pipeline stage
"""
