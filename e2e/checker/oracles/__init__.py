"""What each call must answer, computed without the system or asked of an undisturbed one."""
