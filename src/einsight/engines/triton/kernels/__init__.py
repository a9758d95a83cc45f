"""The kernels, in Triton: one file for each family. Imported where they are used: Triton need not be there."""
