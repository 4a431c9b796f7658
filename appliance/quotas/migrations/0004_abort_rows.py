import django.utils.timezone
from django.db import migrations, models


class Migration(migrations.Migration):
    dependencies = [
        ("quotas", "0003_usage_rollups"),
    ]

    operations = [
        migrations.AddField(
            model_name="quotareservation",
            name="began_at",
            field=models.DateTimeField(default=django.utils.timezone.now),
        ),
        migrations.AddField(
            model_name="quotareservation",
            name="key_prefix",
            field=models.CharField(blank=True, default="", max_length=32),
        ),
        migrations.AddField(
            model_name="quotareservation",
            name="model",
            field=models.CharField(blank=True, default="", max_length=200),
        ),
        migrations.AddField(
            model_name="quotareservation",
            name="source",
            field=models.CharField(blank=True, default="", max_length=20),
        ),
    ]
