"""Experiments by configuration: one TOML file is one result, made by ``jaxllama experiment FILE``.

In the order a file meets them: ``config`` reads it into points, ``plan`` says what they will cost,
``run`` measures them one by one with the functions of ``workloads``, ``table`` and ``pictures``
show them, ``compare`` holds two runs side by side.
"""
