// Runs before the first paint: the choice made on this device, else the system's.
{
  let chosen = null;
  try { chosen = localStorage.getItem('theme'); } catch { /* storage may be forbidden */ }
  if (chosen === 'dark' || chosen === 'light') document.documentElement.dataset.theme = chosen;
}
