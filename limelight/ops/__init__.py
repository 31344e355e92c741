"""The operations of both models, each with its equation and its rounding points.

Shape letters, here and everywhere: T tokens, D model, H query heads, K KV heads, C head size,
E experts, N experts chosen a token, F inner size, V vocabulary, B sequences, L keys, S cache slots.
"""
