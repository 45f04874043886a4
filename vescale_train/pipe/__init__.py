"""Pipeline parallelism: any model in stages, any schedule, checked before it runs."""
