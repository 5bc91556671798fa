"""Whole models whose experts are this package's layer; `qwen3_moe` is one."""
