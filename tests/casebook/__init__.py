"""Trainings with one planted fault each, and healthy ones: does the verdict name the cause, and does its advice help?"""
