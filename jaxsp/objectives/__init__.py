"""Objectives of preference training: functions of sums over the documents of pairs."""
