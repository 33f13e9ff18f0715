"""How much memory a model takes, by arithmetic: the operator plans by these sums and the engine allocates by them.

memory                                              what each device holds, and how many KV-cache blocks are left
weight_sizes  quantized_weights  weight_formats  dtype_sizes
                                                    every tensor of a model, also where it is stored with fewer bits
cache_groups                                        layers of different kinds over one pool of equal blocks
pipeline_stages                                     which layers each stage of a pipeline holds
"""
