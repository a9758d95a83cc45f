"""Attention as pure linear algebra."""
