"""Experiments by configuration: one TOML file is one result, made by ``jaxllama experiment FILE``.

The modules in the order in which a file passes them: ``config`` expands the file into points, and
``plan`` estimates their cost. ``run`` measures them one by one with the functions of ``workloads``.
``table`` and ``pictures`` show the results, and ``compare`` compares two runs.
"""
