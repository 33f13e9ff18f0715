"""Memory arithmetic for a model: the operator plans with these sums, and the engine allocates by them.

memory                                              memory use of each device, and number of KV-cache blocks
weight_sizes  quantized_weights  weight_formats  dtype_sizes
                                                    sizes of all tensors, including quantized ones
planned_formats  named_experts                      formats of the weights according to config.json
cache_groups  kv_format  state_layout               layers of different kinds share one pool of equal blocks
packed_weights                                      which quantized matrices GPUs pack, and their workspace
activations  lora                                   memory of a step, and of adapters
graph_memory  step_shapes  part_sizes               memory of CUDA graphs, and the shapes that they are captured for
batch_limits                                        default limits of a step
pipeline_stages  sharding                           layers of each pipeline stage; shards of each layer
"""
