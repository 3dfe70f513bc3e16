"""The results of [D] Tables 1 to 3 (Campos et al., ICCS 2017), for comparison with ours.

The paper trains ResNet-50 with 1,200 classes and the mixed strategy: synchronously inside each node
of four K80 GPUs, and asynchronously between the nodes.
"""

# Configuration, nodes, images per second, speedup, efficiency.
THROUGHPUT = (
    ("1 node", 1, 124.18, 1.0, 1.0),
    ("2 workers + 1 PS, shared", 2, 195.60, 1.58, 0.79),
    ("4 workers + 1 PS, shared", 4, 292.22, 2.35, 0.58),
    ("4 workers + 3 PS, shared (Table 1)", 4, 374.73, 3.02, 0.76),
    ("4 workers + 3 PS, shared (Table 2)", 4, 383.09, 3.09, 0.77),
    ("4 workers + 3 PS, dedicated", 7, 396.62, 3.19, 0.46),
    ("8 workers + 7 PS, shared", 8, 809.10, 6.52, 0.82),
)

# Workers, test accuracy, hours, speedup to the same loss.
LEARNING = (
    ("1 worker", 0.228, 106.43, 1.00),
    ("2 workers", 0.217, 62.78, 1.69),
    ("4 workers", 0.202, 37.99, 2.80),
    ("8 workers", 0.217, 22.50, 4.73),
)
