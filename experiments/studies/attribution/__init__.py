"""What each training digit did to the loss of an unseen one."""
