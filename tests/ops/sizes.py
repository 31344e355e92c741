"""The sizes that the models have, for kernels to be right at."""

# Weights, rows and columns: Flint's, and those of one of eight ranks of Beam.
WEIGHTS = {
    "flint qkv": (5120, 2048),
    "flint o": (2048, 4096),
    "flint gate_up": (12288, 2048),
    "flint shared gate_up": (2048, 2048),
    "flint down": (2048, 6144),
    "flint head": (150144, 2048),
    "beam qkvg": (1792, 5120),
    "beam o": (5120, 768),
    "beam gate_up": (5120, 5120),
    "beam down": (5120, 2560),
    "beam head": (18992, 5120),
}
# Channels, experts, chosen, inner channels, those of the shared expert, FP32 SwiGLU, scale: of
# Flint, of one of eight ranks of Beam, and of a small model.
EXPERTS = [
    (2048, 256, 6, 512, 1024, False, 1.0),
    (5120, 256, 8, 320, 0, True, 2.5),
    (192, 8, 2, 64, 192, False, 1.0),
]
