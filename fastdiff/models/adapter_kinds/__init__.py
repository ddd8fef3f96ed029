"""Kinds of adapters (``--lora.kind``): layers, trained parameters, files, and what other programs read of them.

A kind is one frozen record. To add one, write its record here, and add it to ``kinds`` and to ``LoraConfig.kind``.
"""
