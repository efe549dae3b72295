"""Plots and an HTML page of what a simulation found.

Takes findings, gives figures and files. Nothing here simulates.
"""
